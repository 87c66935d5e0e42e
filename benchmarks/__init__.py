"""Measures the product from outside; nothing in it imports this folder."""
