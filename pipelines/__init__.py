"""Ray Data: tasks in, rollouts to groups, groups to credited samples to learner shards. Imports rtpo_ray, never actors."""
