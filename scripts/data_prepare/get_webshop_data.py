"""Writes the data set of WebShop sessions: train.jsonl and test.jsonl."""

from trireme.ext.webshop.data import main

if __name__ == "__main__":
    main()
