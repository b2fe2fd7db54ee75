"""Messages between server and clients, their checks, and what the server keeps."""
