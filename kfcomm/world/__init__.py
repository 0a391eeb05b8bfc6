"""The communicator of a world, its epochs, and the device that it uses."""
