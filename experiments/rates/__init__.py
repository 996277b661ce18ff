"""Where training begins to fail, by how far its noise alone would carry a row; clips and batches beside it."""
