"""Every exception of the project that a user can meet, in one place."""


class RtpoError(Exception):
    """Base of the project's own errors."""


class ConfigError(RtpoError):
    """A field of the configuration is unknown, of the wrong type or impossible; exit code 2."""


class ContextMismatch(RtpoError):
    """The context that the learner would train on is not the one that the engine saw."""


class MethodError(RtpoError):
    """A method made something that could only be trained wrongly, or failed while it did."""


class NonFiniteUpdate(RtpoError):
    """Updates kept producing NaN or infinity, so the run stops before it trains on garbage."""


class WeightSyncError(RtpoError):
    """No generator could be brought to the weight version that the next stage needs."""


class DeadlineExceeded(RtpoError):
    """A wait for another process overran its deadline."""


class CheckpointError(RtpoError):
    """The learner's state could not be written; what was written before is still there."""


class CoordinatorLost(RtpoError):
    """The coordinator does not answer, or does not get on; another must take its place."""


class LearnerLost(RtpoError):
    """A learner rank died or does not answer; the gang must be started again."""


class ConservationError(RtpoError):
    """Rollouts went missing: produced differs from trained + filtered + failed."""


class EngineError(RtpoError):
    """The sampling engine refused or lost a request."""


class EnvironmentLost(RtpoError):
    """A server that an environment needs does not answer, or refuses what it is asked."""


class NoGenerators(RtpoError):
    """Every generator is gone, or none became ready before the deadline."""


class ToolServerError(RtpoError):
    """A server of tools did not start, died, or did not answer in time; the rollout is tried again."""


class GraderError(RtpoError):
    """An answer could not be judged; it is neither right nor wrong."""


class DataError(RtpoError):
    """The files of tasks are not there, or lack what the environment reads."""


class SandboxError(RtpoError):
    """Python code cannot be confined on this machine, or the process that does it does not start."""
