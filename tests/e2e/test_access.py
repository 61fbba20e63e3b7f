"""Who may use the service: TLS, mutual TLS, tokens with roles, and what belongs to a token."""

from __future__ import annotations

import io
import json
import re
import shutil
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moored
import pytest
import trustme
from moored._generated import residency_pb2
from PIL import Image
from waiting import wait_until

from service import INSTANT_MODELS, ROOT, Service, clean_environment, run, write_secret

TOKEN = "0123456789abcdef0123456789abcdef"
SIM = ("sim:2GiB",)


def told(*arguments: str, **options: Any) -> dict[str, Any]:
    """The answer of a command as JSON."""
    done = run(*arguments, "--json", **options)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def make_token(state: Path, name: str, *limits: str, role: str = "generate") -> str:
    made = told("token", "make", name, "--role", role, "--state", str(state), *limits)
    return str(made["token"])


def picture() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 30, 40)).save(out, "PNG")
    return out.getvalue()


PICTURE = picture()
SMALL: dict[str, Any] = {"model": "small", "steps": 1, "width": 64, "height": 64}


def accepted(client: moored.Client) -> None:
    """Waits until a service has read a token that was made while it ran."""

    def is_let_in() -> bool:
        try:
            return bool(client.server_info().version)
        except moored.Unauthenticated:
            return False

    wait_until(is_let_in, "the token")


class Encrypted:
    """A service with a certificate of its own, and tokens of each role."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        init = told("serve", "--init", "--state", str(self.state))
        self.fingerprint = str(init["fingerprint"])
        self.tokens = {"administer": str(init["token"])}
        self.tokens |= {
            role: make_token(self.state, role, role=role) for role in ("observe", "generate")
        }
        self.service = Service(
            *("--set", "service.own_certificate=true", "--set", "limits.handshake=10s"),
            *("--models", str(INSTANT_MODELS)),
            state=self.state,
            devices=SIM,
        )
        self.endpoint = f"https://{self.service.address}"

    def client(self, role: str = "administer", **options: Any) -> moored.Client:
        options = {"token": self.tokens.get(role, ""), "fingerprint": self.fingerprint} | options
        return moored.Client(self.endpoint, **options)


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encrypted]:
    made = Encrypted(tmp_path_factory.mktemp("encrypted"))
    with made.client() as client:
        client.wait_until_ready()
    yield made
    assert made.service.stop() == 0
    log = "".join(made.service.log)
    assert not any(token in log for token in made.tokens.values())


@pytest.fixture
def own(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with a file of credentials."""
    return clean_environment() | {"MOORED_CREDENTIALS": str(tmp_path / "credentials.json")}


# TLS.


def test_init_makes_a_certificate_and_a_token_once(encrypted: Encrypted) -> None:
    again = told("serve", "--init", "--state", str(encrypted.state))
    assert again["fingerprint"] == encrypted.fingerprint
    assert again["token"] is None
    in_words = run("serve", "--init", "--state", str(encrypted.state))
    assert in_words.returncode == 0
    for word in (encrypted.fingerprint, "moored token use", "service.own_certificate=true"):
        assert word in in_words.stdout
    for name in ("certificate-key.pem", "tokens.json"):
        assert stat.S_IMODE((encrypted.state / name).stat().st_mode) == 0o600, name
    assert any(encrypted.fingerprint in line for line in encrypted.service.log)


def test_the_certificate_is_pinned_by_python_and_by_the_command_line(
    encrypted: Encrypted, own: dict[str, str], tmp_path: Path
) -> None:
    with encrypted.client() as client:
        assert client.server_info().version
        assert client.generate_image(
            "a cube", model="moored/demo", steps=1, width=64, height=64
        ).data
    (tmp_path / "token").write_text(encrypted.tokens["observe"])
    given = ("status", "--endpoint", encrypted.endpoint, "--token-file", str(tmp_path / "token"))
    pinned = run(*given, "--fingerprint", encrypted.fingerprint, env=own)
    assert pinned.returncode == 0, pinned.stderr
    wrong = run(*given, "--fingerprint", "0" * 64, env=own)
    assert wrong.returncode == 3
    assert encrypted.fingerprint in wrong.stderr
    unpinned = run(*given, env=own)
    assert unpinned.returncode == 3
    assert "certificate" in unpinned.stderr
    as_authority = own | {"MOORED_CA_FILE": str(encrypted.state / "certificate.pem")}
    assert run(*given, env=as_authority).returncode == 0


def test_a_kept_token_is_sent_to_its_address_with_its_fingerprint(
    encrypted: Encrypted, own: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(encrypted.tokens["observe"])
    at = ("--endpoint", encrypted.endpoint)
    kept = run(
        "token",
        "use",
        str(tmp_path / "token"),
        *at,
        "--fingerprint",
        encrypted.fingerprint,
        env=own,
    )
    assert kept.returncode == 0, kept.stderr
    file = Path(own["MOORED_CREDENTIALS"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run("status", *at, env=own).returncode == 0
    # The Python client reads the same file.
    code = f"import moored; print(moored.Client({encrypted.endpoint!r}).server_info().version)"
    asked = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    assert run("token", "forget", *at, env=own).returncode == 0
    assert run("token", "forget", *at, env=own).returncode == 2
    assert run("status", *at, env=own).returncode == 3


def test_a_connection_without_a_handshake_is_closed_and_keeps_nobody_waiting(
    encrypted: Encrypted,
) -> None:
    host, port = encrypted.service.address.rsplit(":", 1)
    silent = [socket.create_connection((host, int(port))) for _ in range(20)]
    with encrypted.client("observe") as client:
        assert client.server_info().version
    for connection in silent:
        connection.settimeout(30)
        assert connection.recv(1) == b""


def test_a_new_certificate_is_taken_and_open_connections_stay(tmp_path: Path) -> None:
    authority = trustme.CA()
    pem = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(pem)
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"

    def issue() -> None:
        made = authority.issue_cert("localhost", "127.0.0.1")
        for file, blobs in ((key, [made.private_key_pem]), (certificate, made.cert_chain_pems)):
            new = file.with_suffix(".new")
            new.write_bytes(b"".join(blob.bytes() for blob in blobs))
            new.chmod(0o600)
            new.replace(file)

    issue()
    given = (f"service.certificate={certificate}", f"service.certificate_key={key}")
    service = Service(
        *(word for each in given for word in ("--set", each)), state=tmp_path / "state", devices=SIM
    )

    def served() -> str:
        host, port = service.address.rsplit(":", 1)
        return ssl.get_server_certificate((host, int(port)))

    try:
        with moored.Client(f"https://{service.address}", ca_file=str(pem)) as client:
            client.wait_until_ready()
            changes = client.watch_status()
            next(iter(changes))
            before = served()
            key.write_text("no key")
            service.wait_for_log(lambda: any("cannot be used" in line for line in service.log))
            assert served() == before, "the old ones stay in force"
            issue()
            wait_until(lambda: served() != before, "the new certificate")
            # The call that was open then goes on.
            with moored.Client(f"https://{service.address}", ca_file=str(pem)) as other:
                other.load("moored/demo")
            next(iter(changes))
            changes.close()
    finally:
        assert service.stop() == 0


def test_mutual_tls_lets_in_who_shows_a_certificate(tmp_path: Path, own: dict[str, str]) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    pem = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(pem)
    for name, made in (
        ("service", authority.issue_cert("127.0.0.1")),
        ("alice", authority.issue_cert("alice")),
        ("mallory", stranger.issue_cert("alice")),
    ):
        made.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
        made.private_key_pem.write_to_path(tmp_path / f"{name}-key.pem")
        (tmp_path / f"{name}-key.pem").chmod(0o600)
    given = (
        f"service.certificate={tmp_path / 'service.pem'}",
        f"service.certificate_key={tmp_path / 'service-key.pem'}",
        f"service.client_authorities={pem}",
    )
    service = Service(
        *(word for each in given for word in ("--set", each)), state=tmp_path / "state", devices=SIM
    )
    endpoint = f"https://{service.address}"
    try:
        for who, may in (("alice", True), ("mallory", False), (None, False)):
            shown: dict[str, Any] = {}
            env = own | {"MOORED_CA_FILE": str(pem), "MOORED_ENDPOINT": endpoint}
            if who:
                shown = {
                    "certificate": tmp_path / f"{who}.pem",
                    "certificate_key": tmp_path / f"{who}-key.pem",
                }
                env |= {f"MOORED_{name.upper()}": str(file) for name, file in shown.items()}
            with moored.Client(endpoint, ca_file=str(pem), **shown) as client:
                if may:
                    client.wait_until_ready()
                    assert client.server_info().version
                else:
                    with pytest.raises(moored.ConnectionFailed):
                        client.server_info()
            asked = run("status", env=env)
            assert (asked.returncode == 0) is may, asked.stderr
            if not may:
                assert "MOORED_CERTIFICATE" in asked.stderr
    finally:
        assert service.stop() == 0


def test_beyond_loopback_tls_and_tokens_are_asked_for(tmp_path: Path) -> None:
    write_secret(tmp_path / "token", TOKEN)
    token = ("--token-file", str(tmp_path / "token"))
    tls = ("--set", "service.own_certificate=true")
    plain = ("--set", "service.allow_without_tls=true")
    open_to_all = ("--set", "service.allow_without_tokens=true")
    for number, (given, lacks) in enumerate(
        (
            ((), "neither a certificate nor tokens"),
            (token, "no certificate"),
            (tls, "no tokens"),
            (open_to_all, "no certificate"),
            (plain, "no tokens"),
        )
    ):
        for address in ("0.0.0.0:0", "[::]:0") if number == 0 else ("0.0.0.0:0",):
            state = tmp_path / f"state-{number}"
            refused = run(
                "serve", "--listen", address, "--device", "sim:1GiB", "--state", str(state), *given
            )
            assert refused.returncode == 1, refused.stderr
            for word in (lacks, "--init", "service.allow_without_"):
                assert word in refused.stderr, refused.stderr
    for number, given in enumerate(((*token, *tls), (*plain, *open_to_all))):
        listen = ("--set", "service.listen=0.0.0.0:0")
        service = Service(*listen, *given, state=tmp_path / f"served-{number}", devices=SIM)
        assert service.stop() == 0


# Tokens.


def test_a_role_may_do_what_is_its_own_and_no_more(encrypted: Encrypted) -> None:
    def image(client: moored.Client) -> object:
        return client.generate_image("x", model="moored/demo", steps=1, width=64, height=64)

    for call, least in (
        (lambda client: client.status(), "observe"),
        (lambda client: client.jobs(), "observe"),
        (lambda client: client.list_models(), "observe"),
        (image, "generate"),
        (lambda client: client.load("moored/demo"), "generate"),
        (lambda client: client.load("small", replace="slow"), "administer"),
        (lambda client: client.unload(), "administer"),
        (lambda client: client.trim(), "administer"),
    ):
        roles = ["observe", "generate", "administer"]
        for role in roles:
            with encrypted.client(role) as client:
                if roles.index(role) >= roles.index(least):
                    call(client)
                else:
                    with pytest.raises(
                        moored.RoleRequired, match=f"needs a token.* has the role {role}"
                    ) as refused:
                        call(client)
                    assert refused.value.reason == "ROLE_REQUIRED"


def test_tokens_are_made_listed_and_withdrawn_while_the_service_runs(encrypted: Encrypted) -> None:
    state = ("--state", str(encrypted.state))
    secret = make_token(encrypted.state, "visitor", "--jobs", "2", "--expires", "30d")
    (listed,) = [
        record
        for line in run("token", "list", "--json", *state).stdout.splitlines()
        if (record := json.loads(line))["name"] == "visitor"
    ]
    assert listed["role"] == "generate"
    assert listed["limits"] == {"jobs": 2}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT.*Z", listed["expires"])
    in_words = run("token", "list", *state)
    assert "visitor: generate, 2 jobs, until" in in_words.stdout
    assert secret not in in_words.stdout + (encrypted.state / "tokens.json").read_text()
    again = run("token", "make", "visitor", *state)
    assert again.returncode == 2
    assert "withdraw" in again.stderr

    def is_let_in() -> bool:
        with encrypted.client(token=secret) as client:
            try:
                return bool(client.server_info().version)
            except moored.Unauthenticated:
                return False

    wait_until(is_let_in, "the token")
    assert run("token", "withdraw", "visitor", *state).returncode == 0
    wait_until(lambda: not is_let_in(), "the withdrawal")
    assert run("token", "withdraw", "visitor", *state).returncode == 2


def test_the_first_token_closes_a_service_that_runs_and_the_last_one_does_not_open_it(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    service = Service(state=state, devices=SIM)
    try:
        with moored.Client(service.address) as client:
            client.wait_until_ready()
            assert client.server_info().version
        make_token(state, "alice")

        def is_open() -> bool:
            with moored.Client(service.address) as client:
                try:
                    return bool(client.server_info().version)
                except moored.Unauthenticated:
                    return False

        wait_until(lambda: not is_open(), "the first token")
        seen = len(service.log)
        (state / "tokens.json").unlink()
        service.wait_for_log(
            lambda: any("the tokens changed" in line for line in service.log[seen:])
        )
        assert not is_open()
    finally:
        assert service.stop() == 0


def test_a_list_of_tokens_that_cannot_be_read_closes_a_service_that_asked_for_none(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    service = Service(state=state, devices=SIM)
    try:
        with moored.Client(service.address) as client:
            client.wait_until_ready()
        listed = state / "tokens.json"
        listed.write_text("no list")
        listed.chmod(0o600)

        def is_open() -> bool:
            with moored.Client(service.address) as client:
                try:
                    return bool(client.server_info().version)
                except moored.Unauthenticated:
                    return False

        wait_until(lambda: not is_open(), "the refusal")
        listed.unlink()
        secret = make_token(state, "alice")

        def is_let_in() -> bool:
            with moored.Client(service.address, token=secret) as client:
                try:
                    return bool(client.server_info().version)
                except moored.Unauthenticated:
                    return False

        wait_until(is_let_in, "the token")
        assert not is_open()
    finally:
        assert service.stop() == 0


def test_a_withdrawn_token_ends_what_goes_on_with_it(encrypted: Encrypted) -> None:
    secret = make_token(encrypted.state, "mallory")
    with encrypted.client(token=secret) as client, encrypted.client() as administrator:
        accepted(client)
        others = administrator.watch_status()
        next(iter(others))
        watched = client.watch_status()
        next(iter(watched))
        client.hold("small", ttl_s=600)
        with client.stream_image("detached", model="slow", steps=200, detach=True) as detached:
            next(iter(detached))
        listened = client.stream_image("listened to", model="slow", steps=200)
        next(iter(listened))
        withdrawn = run("token", "withdraw", "mallory", "--state", str(encrypted.state))
        assert withdrawn.returncode == 0, withdrawn.stderr
        with pytest.raises(moored.Unauthenticated, match="withdrawn"):
            for _ in watched:
                pass
        with pytest.raises((moored.Unauthenticated, moored.Cancelled)) as ended:
            listened.result()
        assert not isinstance(ended.value, moored.Cancelled) or ended.value.how == "withdrawn"

        def has_jobs() -> bool:
            return any(job.id == detached.job_id for job in administrator.jobs())

        wait_until(lambda: not has_jobs(), "the end of the detached job")
        next(iter(others))
        others.close()


def test_a_withdrawn_token_ends_its_session(encrypted: Encrypted) -> None:
    secret = make_token(encrypted.state, "player")
    with encrypted.client(token=secret) as client, encrypted.client() as administrator:
        accepted(client)
        with pytest.raises(moored.Unauthenticated, match="withdrawn"):  # noqa: SIM117
            with client.audio_session("track") as session:
                run("token", "withdraw", "player", "--state", str(encrypted.state))
                for _ in session:
                    pass
        wait_until(lambda: not administrator.jobs(), "the end of its segments")


def test_init_makes_a_token_where_all_were_withdrawn(tmp_path: Path) -> None:
    state = ("--state", str(tmp_path / "state"))
    first = told("serve", "--init", *state)
    assert run("token", "withdraw", "administrator", *state).returncode == 0
    again = told("serve", "--init", *state)
    assert again["token"]
    assert again["token"] != first["token"]
    assert again["fingerprint"] == first["fingerprint"]
    assert told("serve", "--init", *state)["token"] is None


def test_a_lost_certificate_is_not_replaced(tmp_path: Path) -> None:
    state = tmp_path / "state"
    told("serve", "--init", "--state", str(state))
    (state / "certificate.pem").unlink()
    own = ("--set", "service.own_certificate=true", "--device", "sim:1GiB", "--listen")
    refused = run("serve", *own, "127.0.0.1:0", "--state", str(state))
    assert refused.returncode == 1
    for word in ("certificate.pem is not there", "fingerprint", "remove"):
        assert word in refused.stderr, refused.stderr
    assert run("serve", "--init", "--state", str(state)).returncode == 1
    assert not (state / "certificate.pem").exists()


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    told("serve", "--init", "--state", str(tmp_path / "own"))
    key = tmp_path / "own" / "certificate-key.pem"
    pair = (
        f"service.certificate={tmp_path / 'own' / 'certificate.pem'}",
        f"service.certificate_key={key}",
    )
    given = ("--listen", "127.0.0.1:0", "--device", "sim:1GiB", "--state", str(tmp_path / "state"))
    for file, settings in ((token, (f"service.token_file={token}",)), (key, pair)):
        options = [word for each in settings for word in ("--set", each)]
        for mode in (0o604, 0o620, 0o602):
            file.chmod(mode)
            refused = run("serve", *given, *options)
            assert refused.returncode == 1
            assert f"chmod 600 {file}" in refused.stderr, refused.stderr
            examined = run("doctor", *options)
            assert f"chmod 600 {file}" in examined.stdout, examined.stdout


def test_an_expired_token_is_refused(encrypted: Encrypted) -> None:
    secret = make_token(encrypted.state, "brief", "--expires", "1s")

    def refusal() -> str:
        with encrypted.client(token=secret) as client:
            try:
                client.server_info()
            except moored.Unauthenticated as refused:
                return refused.message
        return ""

    wait_until(lambda: "expired" in refusal(), "the expiry")


# How much a token may do.


def test_jobs_of_a_token_are_bounded(encrypted: Encrypted) -> None:
    secret = make_token(encrypted.state, "one-job", "--jobs", "1")
    with encrypted.client(token=secret) as client, encrypted.client("generate") as other:
        accepted(client)
        with client.stream_image("one", model="slow", steps=200) as first:
            next(iter(first))
            with pytest.raises(moored.TokenLimit, match=r"one-job.*may have 1") as refused:
                client.generate_image("another", **SMALL)
            assert refused.value.limit == "jobs"
            assert refused.value.retry_after_s
            with other.stream_image("of another token", **SMALL) as accepted_too:
                next(iter(accepted_too))
        with pytest.raises(moored.Cancelled):
            first.result()

        def has_ended() -> bool:
            # The call ends before the service has taken the job from its list.
            try:
                return bool(client.generate_image("when it has ended", **SMALL).data)
            except moored.TokenLimit:
                return False

        wait_until(has_ended, "the end of the first job")


@pytest.mark.parametrize(
    ("option", "limit"),
    [("--pixels", "pixels_per_minute"), ("--bytes", "bytes_per_minute")],
)
def test_a_token_may_have_so_much_a_minute(encrypted: Encrypted, option: str, limit: str) -> None:
    each = 64 * 64 if option == "--pixels" else len(PICTURE)
    secret = make_token(encrypted.state, f"some{option}", option, str(3 * each // 2))
    with encrypted.client(token=secret) as client:
        accepted(client)

        def ask(times: int = 1) -> object:
            if option == "--pixels":
                return client.generate_image("x", **SMALL, count=times)
            return client.put_media(PICTURE)

        ask()
        with pytest.raises(moored.TokenLimit, match="a minute.*try again in") as refused:
            ask()
        assert refused.value.limit == limit
        assert 0 < (refused.value.retry_after_s or 0) <= 60
        if option == "--pixels":
            with pytest.raises(moored.TokenLimit, match="this alone has") as too_large:
                ask(2)
            assert too_large.value.retry_after_s is None


def test_a_request_that_is_sent_again_joins_its_job_though_its_token_is_at_its_limit(
    encrypted: Encrypted,
) -> None:
    secret = make_token(encrypted.state, "again", "--pixels", str(64 * 64))
    slow: dict[str, Any] = SMALL | {"model": "slow", "steps": 200, "idempotency_key": "mine"}
    with encrypted.client(token=secret) as client:
        accepted(client)
        with client.stream_image("one", **slow) as first:
            next(iter(first))
            with client.stream_image("one", **slow) as again:
                next(iter(again))
                assert again.job_id == first.job_id
            with pytest.raises(moored.TokenLimit) as refused:
                client.generate_image("one", **slow | {"idempotency_key": "another"})
            assert refused.value.limit == "pixels_per_minute"
            with pytest.raises(moored.KeyReused):
                client.generate_image("another", **slow)


def test_a_token_may_use_its_own_models_alone(encrypted: Encrypted) -> None:
    secret = make_token(encrypted.state, "modest", "--model", "small", "--model", "slow")
    with encrypted.client(token=secret) as client:
        accepted(client)
        client.load("slow")
        for call in (
            lambda: client.load("moored/demo"),
            lambda: client.hold("moored/demo"),
            lambda: client.generate_image("x", **SMALL | {"model": "moored/demo"}),
        ):
            with pytest.raises(
                moored.TokenLimit, match="may not use moored/demo: .*slow, small"
            ) as refused:
                call()
            assert refused.value.limit == "models"
            assert refused.value.retry_after_s is None
        with pytest.raises(moored.TokenLimit, match="may not use track"):
            client.audio_session("track").open()


# What belongs to a token.


@pytest.fixture(scope="module")
def alice_and_bob(encrypted: Encrypted) -> Iterator[tuple[moored.Client, moored.Client]]:
    secrets = [make_token(encrypted.state, name) for name in ("alice", "bob")]
    # Both say that they are the same client.
    clients = [encrypted.client(token=secret, client_id="same") for secret in secrets]
    for client in clients:
        accepted(client)
    yield clients[0], clients[1]
    for client in clients:
        client.close()


def test_a_latent_is_that_of_its_token(
    encrypted: Encrypted, alice_and_bob: tuple[moored.Client, moored.Client]
) -> None:
    alice, bob = alice_and_bob
    (latent,) = alice.generate_image("mine", keep_latent=True, **SMALL).latents
    uploaded = alice.put_latent(alice.get_latent(latent))
    with encrypted.client() as administrator:
        for one in (latent, uploaded):
            for other in (bob, administrator):
                with pytest.raises(moored.LatentNotFound):
                    other.get_latent(one)
                with pytest.raises(moored.LatentNotFound):
                    other.decode_latent(one, model="small")
                with pytest.raises(moored.LatentNotFound):
                    other.generate_image("x", init_latent=one, strength=0.5, **SMALL)
                assert other.release_latent(one) is False
            assert alice.decode_latent(one, model="small").data
    assert alice.release_latent(uploaded) is True


def test_media_are_those_of_their_token(alice_and_bob: tuple[moored.Client, moored.Client]) -> None:
    alice, bob = alice_and_bob
    media = alice.put_media(PICTURE)
    assert bob.release_media(media) is False
    with pytest.raises(moored.InvalidRequest, match="there is no media"):
        bob.generate_image("x", init_media=media, strength=0.5, **SMALL)
    assert alice.generate_image("x", init_media=media, strength=0.5, **SMALL).data
    assert alice.release_media(media) is True


def test_a_job_is_cancelled_by_its_token_or_an_administrator(
    encrypted: Encrypted, alice_and_bob: tuple[moored.Client, moored.Client]
) -> None:
    alice, bob = alice_and_bob
    with encrypted.client() as administrator:
        for key, owner in (("one", alice), ("two", administrator)):
            with alice.stream_image("x", model="slow", steps=200, idempotency_key=key) as stream:
                next(iter(stream))
                with pytest.raises(moored.JobNotFound):
                    bob.cancel(stream.job_id)
                # The same key is another job.
                with bob.stream_image("y", idempotency_key=key, **SMALL) as another:
                    next(iter(another))
                    assert another.job_id != stream.job_id
                assert owner.cancel(stream.job_id) is True
                with pytest.raises(moored.Cancelled):
                    stream.result()
            with pytest.raises(moored.JobNotFound):
                bob.cancel(stream.job_id)
            assert alice.cancel(stream.job_id) is False, "it has ended"


def test_a_hold_is_that_of_its_token(alice_and_bob: tuple[moored.Client, moored.Client]) -> None:
    alice, bob = alice_and_bob
    hold = alice.hold("small", ttl_s=600)
    theirs = bob.hold("small", ttl_s=600)
    assert theirs.id != hold.id, "the name of a client does not make it the same"
    assert (
        bob._connection.stubs.residency.ReleaseHold(
            residency_pb2.ReleaseHoldRequest(hold_id=hold.id), metadata=bob._line.metadata()
        ).released
        is False
    )
    assert theirs.release() is True
    assert hold.release() is True


def test_an_administrator_sees_names_and_sizes_and_no_prompt(
    encrypted: Encrypted, alice_and_bob: tuple[moored.Client, moored.Client]
) -> None:
    alice, _ = alice_and_bob
    secret = "a prompt that nobody else reads"
    with (
        alice.stream_image(secret, model="slow", steps=200) as stream,
        encrypted.client() as administrator,
    ):
        next(iter(stream))
        listed = administrator.jobs(include_ended=True)
        assert any(job.id == stream.job_id and job.client_id == "same" for job in listed)
        assert secret not in repr(listed) + repr(administrator.status())
    with pytest.raises(moored.Cancelled):
        stream.result()
    assert not any(secret in line for line in encrypted.service.log)


# Whose a token is.


def test_a_token_is_sent_to_the_endpoint_beside_it_alone(
    tmp_path: Path, own: dict[str, str]
) -> None:
    """The token of a file or of the environment does not go where a flag points."""
    write_secret(tmp_path / "token", TOKEN)
    service = Service(
        "--token-file", str(tmp_path / "token"), state=tmp_path / "state", devices=SIM
    )
    here = f"http://{service.address}"
    file = tmp_path / "moored.toml"
    of_file = f'[client]\nendpoint = "{here}"\ntoken_file = "{tmp_path / "token"}"\n'
    of_another = of_file.replace(here, "http://127.0.0.1:9")
    variables = own | {"MOORED_TOKEN_FILE": str(tmp_path / "token")}
    try:
        for text, env, flags, is_sent in (
            (of_file, own, (), True),
            (of_another, own, ("--endpoint", here), False),
            (of_another, own | {"MOORED_ENDPOINT": here}, (), False),
            ("", variables | {"MOORED_ENDPOINT": here}, (), True),
            ("", variables, ("--endpoint", here), False),
            ("", own, ("--endpoint", here, "--token-file", str(tmp_path / "token")), True),
            (of_another, own, ("--token-file", str(tmp_path / "token"), "--endpoint", here), True),
        ):
            file.write_text(text)
            asked = run("jobs", "--config", str(file), *flags, env=env)
            assert (asked.returncode == 0) is is_sent, (text, flags, asked.stderr)
            if not is_sent:
                assert asked.returncode == 7
                assert "moored token use" in asked.stderr
    finally:
        assert service.stop() == 0


def test_run_starts_a_service_of_its_own_where_tokens_are_asked_for(tmp_path: Path) -> None:
    """Nobody else can use it meanwhile, and the command needs no token."""
    state = tmp_path / "state"
    make_token(state, "alice")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = tmp_path / "cube.png"
    env = clean_environment() | {"MOORED_SERVICE_STATE": str(state)}
    asked = (
        "run",
        "moored/demo",
        "a cube",
        "--endpoint",
        f"http://127.0.0.1:{port}",
        "--device",
        "cpu",
    )
    done = run(*asked, "--steps", "1", "-W", "64", "-H", "64", "-o", str(out), env=env)
    assert done.returncode == 0, done.stderr
    assert out.exists()


# What a name reaches.


def test_no_name_in_a_request_leaves_the_configured_folders(tmp_path: Path) -> None:
    """Beside the folders lie a model and an adapter that would run. Links in the folders are followed."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    model = (INSTANT_MODELS / "small.instant.json").read_text(encoding="utf-8")
    adapter = next((ROOT / "demo/adapters").glob("*.safetensors"))
    for folder in (inside, outside):
        (folder / "adapters").mkdir(parents=True)
    (outside / "theirs.instant.json").write_text(model, encoding="utf-8")
    (inside / "own.instant.json").write_text(model, encoding="utf-8")
    (inside / "linked.instant.json").symlink_to(outside / "theirs.instant.json")
    shutil.copy(adapter, outside / "adapters/theirs.safetensors")
    (inside / "adapters/linked.safetensors").symlink_to(outside / "adapters/theirs.safetensors")
    service = Service(
        *("--models", str(inside), "--set", f"models.adapters={inside / 'adapters'}"),
        state=tmp_path / "state",
        devices=SIM,
    )
    ups = (
        "../outside",
        "own/../../outside",
        "./../outside",
        str(outside),
        f"/..{outside}",
        "..%2Foutside",
    )
    quick: dict[str, Any] = {"steps": 1, "width": 64, "height": 64}
    try:
        with service.client() as client:
            client.generate_image("x", model="linked", **quick)
            client.generate_image("x", model="moored/demo", adapters=["linked"], **quick)
            for up in ups:
                for name in (f"{up}/theirs", f"{up}/theirs.instant.json"):
                    for call in (
                        lambda name=name: client.generate_image("x", model=name, **quick),
                        lambda name=name: client.load(name),
                        lambda name=name: client.pin(name),
                        lambda name=name: client.hold(name),
                        lambda name=name: client.plan_model(name),
                    ):
                        with pytest.raises((moored.ModelNotFound, moored.InvalidRequest)):
                            call()
                for name in (
                    f"{up}/adapters/theirs",
                    f"{up}/theirs.safetensors",
                    f"../{up}/theirs",
                ):
                    with pytest.raises(moored.InvalidRequest) as refused:
                        client.generate_image("x", model="moored/demo", adapters=[name], **quick)
                    (violation,) = refused.value.violations
                    assert violation.field == "model.adapters[0].id"
            assert {found.id for found in client.list_models()} >= {"own", "linked"}
            assert not any("theirs" in found.id for found in client.list_models())
    finally:
        assert service.stop() == 0
