"""Operations on networks: deriving, measuring, exporting. Plain torch, no transport."""
