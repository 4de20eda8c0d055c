"""Families of models as data: how each names its experts, which config keys hold their sizes, and how one is found."""
