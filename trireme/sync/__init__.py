"""The synchronizer: keeps explorer and trainer on one beat, and proves that weights arrived."""
