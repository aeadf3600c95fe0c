"""The operator of DDPJobs: what a cluster installs. It needs the package `ddpjob`, which has the rules."""
