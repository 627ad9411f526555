"""All tests except those of the method, which are in test_maelm.py."""
