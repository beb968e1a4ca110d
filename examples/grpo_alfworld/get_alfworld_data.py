"""Writes the data set of the games in $ALFWORLD_DATA: train.jsonl and test.jsonl."""

from trireme.ext.alfworld.data import main

if __name__ == "__main__":
    main()
