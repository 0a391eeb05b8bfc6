"""A store that is kept in etcd (3.4 or later), spoken to through its JSON gateway."""
