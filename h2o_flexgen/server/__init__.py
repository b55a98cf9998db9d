"""OpenAI's files and batches over HTTP: a batch is a job, and one job runs after the other."""
