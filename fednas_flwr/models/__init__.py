"""Operations on networks: describing, measuring, exporting. Plain torch, no transport."""
