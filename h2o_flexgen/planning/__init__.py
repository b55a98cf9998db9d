"""From a hardware profile and a job to a policy: cost model, linear program, outer search."""
