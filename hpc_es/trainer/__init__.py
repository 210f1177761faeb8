"""The trainer: a process that makes theta_v of a closed cohort, for methods that train (design, section 14).

Invariant: theta_v depends on theta_{v-1} and the cohort alone, and its checkpoint is whole and on disk before the
trainer says so. A trainer that is killed leaves nothing that counts, and the next one trains the same cohort again.
"""
