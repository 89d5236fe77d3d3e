"""Rules and plans that several model families share. A family imports these files, and no other family."""
