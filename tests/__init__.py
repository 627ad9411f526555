"""Tests of one file each; those of the method are in test_maelm.py."""
