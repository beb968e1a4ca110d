"""Writes the data set of WebShop sessions: train.jsonl and test.jsonl."""

from trireme.envs.webshop.data import main

if __name__ == "__main__":
    main()
