"""Measurements that need a checkout and other libraries; users measure their own machines with ``kfcomm bench``."""
