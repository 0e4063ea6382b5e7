"""What a person is told where the cluster refuses an operation: which one, on what, and what to type. The one place for it."""

from __future__ import annotations

from echo_bus.errors import NotAuthorized
from echo_schemas.rights import Acl, Resource

LOGIN_HINT = "Check the user and the password, token or certificate in [kafka.client]; is the user known to the cluster?"
# In a command where the one is needed that runs into the refusal, and it does not know its own name or the address.
_SOMEBODY, _SOMEWHERE = "User:LOGIN", "HOST:PORT"
# A role without any right lacks thirty.
_MOST_NAMED = 3


def refused(operation: str, resource: Resource, name: str) -> NotAuthorized:
    """The error for one operation that was just refused, in the words of `echoswarm acls render`: `refused("Write", Resource.TOPIC, …)`."""
    return refusal(Acl(_SOMEBODY, resource, name, operation))


def refusal(*lacking: Acl, bootstrap: str = _SOMEWHERE) -> NotAuthorized:
    """The error for permissions that are not there, at least one, all of the same principal."""
    first, more = lacking[0], len(lacking) - _MOST_NAMED
    named = ", ".join(acl.words for acl in lacking[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    who = "this login" if first.principal == _SOMEBODY else first.principal
    rest = "all that each role needs: `echoswarm acls render`." if len(lacking) == 1 else "and so on: `echoswarm acls render` prints all."
    return NotAuthorized(f"The cluster refuses {who} {named}.", hint=f"Type `{first.command(bootstrap)}`; {rest}", resource=first.resource)
