"""What a job can make of a log: private sums, two-towers by any mechanism, popularity."""
