"""Searches that go on for as long as they are let, and never run the same twice: ``make search``."""
