"""What a launcher tells a process: its rank, how many there are, and where rank 0 is.

`torchrun` and `deepspeed` set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. In a job
step of SLURM without them, the step's own variables give the same.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from collections.abc import Mapping, MutableMapping

from conceptmoe_vl.errors import UserError

# Ports above those of services and below those that Linux hands out by itself.
_FIRST_PORT, _PORTS = 15000, 15000
_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface


def read_number(name: str, default: int) -> int:
    """A number of the environment.

    Raises:
        UserError: it is none.
    """
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise UserError(f"environment variable {name} is {text!r}; launchers set it to a number")
    return int(text)


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list: `gpu[007-010,12],cpu1` -> `gpu007`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The launcher's variables of a task that `srun` started; empty elsewhere.

    A batch script itself, and a program it starts without `srun`, is no task of a step: SLURM sets
    the variables of steps in tasks alone.
    """
    if "SLURM_STEP_NUM_TASKS" not in environment or "RANK" in environment:
        return {}
    job = re.sub(r"\D", "", environment.get("SLURM_JOB_ID", "")) or "0"
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    return {
        "RANK": environment.get("SLURM_PROCID", "0"),
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": first_host(nodes) or "127.0.0.1",
        "MASTER_PORT": str(_FIRST_PORT + int(job) % _PORTS),
    }


def complete_environment(environment: MutableMapping[str, str]) -> None:
    """Adds the launcher's variables where SLURM alone knows them; what is set stays."""
    for name, value in slurm_variables(environment).items():
        environment.setdefault(name, value)


def own_address() -> str:
    """The address of this machine on the way to rank 0's; its name where there is no such way."""
    target = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, *_, place = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # of UDP: sends nothing
            return probe.getsockname()[0]
    except OSError:
        return socket.gethostname()


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None where it cannot be found out."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None


def bind_gloo(address: str) -> None:
    """Lets gloo talk over the interface that leads to rank 0, unless the user has chosen one.

    By itself it takes what the machine's name resolves to, which on many machines is an address
    that others cannot reach, or none.
    """
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        name = interface_of(address)
        if name is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = name
