"""Messages between server and clients: requests, replies, states, keys and secure sums."""
