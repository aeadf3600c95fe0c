"""The verbs ``compare`` and ``bench``, which run whole trainings and judge or time them."""
