"""The federation of the server's tests, whose clients misbehave on demand."""

from ..server.conftest import federation as federation
