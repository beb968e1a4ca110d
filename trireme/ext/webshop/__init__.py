"""WebShop: an online shop in text, page for page and reward for reward like the original's."""
