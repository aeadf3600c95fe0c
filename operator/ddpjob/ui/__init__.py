"""``ddpjob ui``: pages about jobs on 127.0.0.1, for the user who started it and with the rights of this user."""
