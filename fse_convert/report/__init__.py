"""What people read: tables, JSON, progress and messages. Besides the command line, the only room that knows of terminals."""
