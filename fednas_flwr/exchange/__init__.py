"""What travels between the server and its clients, and what the server accepts and keeps."""
