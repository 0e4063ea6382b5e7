"""The error for an operation that the cluster refuses: which operation, on which resource, and the command that allows it."""

from __future__ import annotations

from echo_bus.errors import NotAuthorized
from echo_schemas.rights import Acl, Resource

LOGIN_HINT = "Check the user and the password, token or certificate in [kafka.client]; is the user known to the cluster?"
# Placeholders in the command of the hint, if the principal or the address is unknown.
_SOMEBODY, _SOMEWHERE = "User:LOGIN", "HOST:PORT"
# A role without any permission lacks thirty.
_MOST_NAMED = 3


def refused(operation: str, resource: Resource, name: str) -> NotAuthorized:
    """The error for one refused operation, named as `echoswarm acls render` names it: `refused("Write", Resource.TOPIC, …)`."""
    return refusal(Acl(_SOMEBODY, resource, name, operation))


def refusal(*lacking: Acl, bootstrap: str = _SOMEWHERE) -> NotAuthorized:
    """The error for one or more missing permissions of one principal."""
    first, more = lacking[0], len(lacking) - _MOST_NAMED
    named = ", ".join(acl.words for acl in lacking[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    who = "this login" if first.principal == _SOMEBODY else first.principal
    rest = "all that each role needs: `echoswarm acls render`." if len(lacking) == 1 else "and so on: `echoswarm acls render` prints all."
    return NotAuthorized(f"The cluster refuses {who} {named}.", hint=f"Type `{first.command(bootstrap)}`; {rest}", resource=first.resource)
