"""What `rlhf rehearse` puts in place of a job's model and data, and what it tells of the run."""
