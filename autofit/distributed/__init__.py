"""What the ranks of a process group are, and how they agree outside the collectives of the step."""

from autofit.distributed.group import rank, world_size
from autofit.distributed.team import Kept, Report, Team, first_failure, team_of_all

__all__ = ["Kept", "Report", "Team", "first_failure", "rank", "team_of_all", "world_size"]
