"""Settings come from defaults, then a file, then the environment; unknown names are refused."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect

from megatron_flashckpt.agent_config import MOST
from megatron_flashckpt.config import (
    FILE_VARIABLE,
    Best,
    Config,
    Replicated,
    Retention,
    load_config,
)
from megatron_flashckpt.errors import ConfigError


@pytest.fixture
def write(tmp_path: Path):
    """Return a function that writes a settings file and returns its path."""

    def write(text: str | bytes) -> Path:
        path = tmp_path / "flashckpt.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def fields_of(struct: type[msgspec.Struct], prefix: str = "") -> dict[str, object]:
    """Return the default of every setting by its dotted name."""
    defaults: dict[str, object] = {}
    for field in msgspec.structs.fields(struct):
        if isinstance(field.default, msgspec.Struct):
            defaults |= fields_of(type(field.default), f"{prefix}{field.name}.")
        else:
            defaults[prefix + field.name] = field.default
    return defaults


def test_settings_come_from_the_environment_before_the_file_and_the_defaults(write, monkeypatch):
    assert load_config(environ={}) == Config()
    monkeypatch.setenv("FLASHCKPT_SLOTS", "3")
    assert load_config().slots == 3
    path = write("slots: 4\nbusy: skip\nagent: {grace_s: 60, persist_threads: 5}")
    agent = msgspec.structs.replace(Config().agent, grace_s=60.0, persist_threads=5)
    of_file = msgspec.structs.replace(Config(), slots=4, busy="skip", agent=agent)
    assert load_config(path, {}) == of_file
    assert load_config(environ={FILE_VARIABLE: str(path)}) == of_file
    assert load_config(path, {FILE_VARIABLE: "/no/such/file"}) == of_file, "code names the file"
    config = load_config(path, {"FLASHCKPT_SLOTS": "6", "FLASHCKPT_AGENT__GRACE_S": "7.5"})
    assert (config.slots, config.busy) == (6, "skip")
    assert (config.agent.grace_s, config.agent.persist_threads) == (7.5, 5)
    others = {"PATH": "/bin", "MY_FLASHCKPT_SLOTS": "x", "FLASHCKPTSLOTS": "x", "SLOTS": "9"}
    assert load_config(environ=others) == Config()


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "{}", "agent: {}"])
def test_a_file_without_settings_means_the_defaults(write, text):
    assert load_config(write(text), {}) == Config()


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        *(("RESTORE_FROM_MEMORY", text, True) for text in ("true", "yes")),
        *(("RESTORE_FROM_MEMORY", text, False) for text in ("false", "off")),
        *(("RUNTIME_DIR", text, text) for text in ("relative/x", "/with space/x", "/a:b/x")),
        ("REPLICATED__WEIGHT", "first", Replicated(weight="first", optimizer="share")),
        ("REPLICATED__OPTIMIZER", "2", Replicated(weight="share", optimizer=2)),
    ],
)
def test_values_in_the_environment_are_those_of_yaml(variable, text, value):
    config = load_config(environ={f"FLASHCKPT_{variable}": text})
    assert getattr(config, variable.partition("__")[0].lower()) == value


@pytest.mark.parametrize(("name", "default"), fields_of(Config).items())
def test_every_setting_can_be_set_in_file_and_environment(write, name, default):
    text = {None: "null", (): "[]"}.get(default, str(default).lower())
    variable = "FLASHCKPT_" + name.upper().replace(".", "__")
    *sections, field = name.split(".")
    lines = [f"{'  ' * depth}{section}:\n" for depth, section in enumerate(sections)]
    path = write("".join(lines) + f"{'  ' * len(sections)}{field}: {text}\n")
    assert load_config(path, {}) == load_config(environ={variable: text}) == Config()


def test_unknown_settings_in_a_file_are_all_named(write):
    path = write("slot: 3\nslots: 2\nagent:\n  grace: 1\nzebra:\n  a: 1\n1: 2\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    message = str(caught.value)
    assert message.startswith(
        f"{path}: unknown settings 1, agent.grace (did you mean agent.grace_s?), "
        "slot (did you mean slots?), zebra; correct or remove them; known ones:"
    )
    for name in fields_of(Config):
        assert name in message.partition("known ones:")[2]


def test_unknown_variables_are_all_named():
    environ = {
        "FLASHCKPT_SLOT": "3",
        "FLASHCKPT_SLOTS": "3",
        "FLASHCKPT_AGENT_GRACE_S": "1",
        "FLASHCKPT_AGENT": "{}",
        "FLASHCKPT_SLOTS__X": "1",
        "FLASHCKPT_": "1",
    }
    with pytest.raises(ConfigError, match=r"^environment: unknown settings") as caught:
        load_config(environ=environ)
    named, _, known = str(caught.value).partition("; correct or remove them; known ones: ")
    named = re.sub(r" \(did you mean \w+\?\)", "", named)
    named = named.removeprefix("environment: unknown settings ")
    assert set(named.split(", ")) == set(environ) - {"FLASHCKPT_SLOTS"}
    assert "FLASHCKPT_AGENT_GRACE_S (did you mean FLASHCKPT_AGENT__GRACE_S?)" in str(caught.value)
    assert "FLASHCKPT_AGENT__GRACE_S" in known, "the list shows other names than users set"


@pytest.mark.parametrize("text", ["agent: 5", "agent: null", "agent: [grace_s]", "agent: x"])
def test_a_plain_value_for_a_section_is_refused(write, text):
    with pytest.raises(ConfigError, match=r"agent must be a section \(fields: grace_s, "):
        load_config(write(text), {"FLASHCKPT_AGENT__GRACE_S": "1"})


COUNT = "a whole number of at least 1"
SHARE = f"first, share or {COUNT}"


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        *(("slots", text, COUNT) for text in ("two", "2.5", "2.0", "true", "null", "[2]")),
        ("read_threads", "many", f"{COUNT} or null"),
        ("staging", "Deferred", "blocking or deferred"),
        ("busy", "7", "skip or wait"),
        ("redundancy", "raid", "copy, none or xor"),
        ("restore_from_memory", "1", "true or false"),
        ("restore_from_memory", "'true'", "true or false"),
        ("drain_timeout_s", "1h", "a number of at least 0"),
        ("drain_timeout_s", "null", "a number of at least 0"),
        ("runtime_dir", "7", "text or null"),
        ("agent.grace_s", "never", "a number of at least 0"),
        ("agent.environment", "[1]", "a list of texts"),
        ("replicated.weight", "last", SHARE),
        ("replicated.optimizer", "1.5", SHARE),
        ("retention.best", "lowest", "a section (fields: metric, keep, mode) or null"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_with_the_allowed_ones(write, name, text, allowed):
    variable = "FLASHCKPT_" + name.upper().replace(".", "__")
    value = msgspec.json.encode(msgspec.yaml.decode(text)).decode()
    sentence = re.escape(f"{name} must be {allowed}, got {value}; see configs/")
    with pytest.raises(ConfigError, match=f"{variable}: {sentence}"):
        load_config(environ={variable: text})
    section, _, field = name.rpartition(".")
    path = write(f"{section}:\n  {field}: {text}" if section else f"{field}: {text}")
    with pytest.raises(ConfigError, match=f"{path}: {sentence}"):
        load_config(path, {})


@pytest.mark.parametrize(
    ("name", "below", "least"),
    [
        ("slots", "0", "1"),
        ("slots", "-1", "1"),
        ("read_threads", "0", "1"),
        ("agent.persist_threads", "0", "1"),
        ("agent.write_threads", "0", "1"),
        ("agent.write_mib_per_s", "0.5", "1"),
        ("agent.writer_nice", "-1", "0"),
        ("agent.session_nice", "-1", "0"),
        ("agent.grace_s", "-0.5", "0"),
        ("agent.start_timeout_s", "0.05", "0.1"),
        ("agent.commit_timeout_s", "0.5", "1"),
        ("drain_timeout_s", "-1", "0"),
        ("failures_in_a_row", "0", "1"),
        ("redundancy_group", "1", "2"),
        ("read_memory_mib", "63", "64"),
        ("replicated.weight", "0", "1"),
    ],
)
def test_the_minimum_is_accepted_and_a_lower_value_is_refused(name, below, least):
    variable = "FLASHCKPT_" + name.upper().replace(".", "__")
    with pytest.raises(ConfigError, match=rf"{name} must be at least {least}, got {below}"):
        load_config(environ={variable: below})
    *sections, field = name.split(".")
    value = load_config(environ={variable: least})
    for section in sections:
        value = getattr(value, section)
    assert getattr(value, field) == float(least)


def test_all_wrong_values_are_named_at_once(write):
    path = write("slots: many\nredundancy: raid\nagent: {grace_s: never}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert all(name in str(caught.value) for name in ("slots", "redundancy", "agent.grace_s"))
    path = write("slots: 0\nretention: {best: {metric: x, keep: 0}}\nagent: {grace_s: -1}\n")
    expected = (
        "slots must be at least 1, got 0; retention.best.keep must be at least 1, got 0; "
        "agent.grace_s must be at least 0, got -1; see configs/ for every field"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert str(caught.value) == f"{path}: {expected}"


def _numbers(kind: inspect.Type, key: str = "") -> dict[str, inspect.IntType | inspect.FloatType]:
    """Return the type of every setting that can be a number."""
    types = {}
    if isinstance(kind, inspect.UnionType):
        for member in kind.types:
            types |= _numbers(member, key)
    elif isinstance(kind, inspect.StructType):
        for field in kind.fields:
            types |= _numbers(field.type, f"{key}.{field.name}".lstrip("."))
    elif isinstance(kind, inspect.IntType | inspect.FloatType):
        types[key] = kind
    return types


def test_every_number_has_bounds():
    numbers = _numbers(inspect.type_info(Config))
    assert {"slots", "retention.best.keep", "agent.grace_s"} <= set(numbers)
    unbounded = {name for name, kind in numbers.items() if kind.ge is None or kind.le != MOST}
    assert unbounded == {"agent.cpus"}, "`cpu_list` checks the form of this setting"


@pytest.mark.parametrize("text", ["some", "3-1", "[0, 1]", "-1"])
def test_an_invalid_list_of_cpus_is_refused(text):
    with pytest.raises(ConfigError, match=r"agent\.cpus"):
        load_config(environ={"FLASHCKPT_AGENT__CPUS": text})
    assert load_config(environ={"FLASHCKPT_AGENT__CPUS": "3"}).agent.cpus == 3
    assert load_config(environ={"FLASHCKPT_AGENT__CPUS": "0-3,8"}).agent.cpus == "0-3,8"


def test_a_file_that_cannot_be_read_is_named_with_the_remedy(tmp_path):
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(ConfigError, match=f"{path}: cannot be read .*unset {FILE_VARIABLE}"):
            load_config(environ={FILE_VARIABLE: str(path)})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *(
            (text, "is not valid YAML")
            for text in (
                *("slots: [", "a: b: c", "\tslots: 2", b"\xff\xfe\x00", b"\x00", "? {a: b}\n: c"),
                *("slots: *unknown", "slots: 2020-99-99", "slots: !!int"),
            )
        ),
        *(
            (text, f"must hold 'field: value' lines, holds {kind}")
            for text, kind in (
                ("- slots", "list"),
                ("slots", "str"),
                ("7", "int"),
                ("true", "bool"),
            )
        ),
        ("slots: 2\nslots: 3", "holds slots more than once; keep one"),
        (
            "agent:\n  grace_s: 60\nslots: 2\nagent:\n  cpus: all",
            "holds agent more than once; keep one",
        ),
        (
            "slots: 2\nagent:\n  cpus: all\n  cpus: inherit\nslots: 2",
            r"holds slots, agent\.cpus more than once; keep one",
        ),
    ],
)
def test_a_file_that_holds_no_settings_is_refused(write, text, reason):
    path = write(text)
    with pytest.raises(ConfigError, match=f"{path}: {reason}"):
        load_config(path, {})


def test_a_settings_file_cannot_call_anything(write, tmp_path):
    made = tmp_path / "made"
    path = write(f"slots: !!python/object/apply:os.mkdir ['{made}']")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        load_config(path, {})
    assert not made.exists()


def test_rules_of_retention_come_from_a_file_or_from_variables(write):
    rules = Retention(latest=3, best=Best(metric="lm loss validation", keep=2, mode="max"))
    text = "retention: {latest: 3, best: {metric: lm loss validation, keep: 2, mode: max}}"
    assert load_config(write(text), {}).retention == rules
    environ = {
        "FLASHCKPT_RETENTION__LATEST": "3",
        "FLASHCKPT_RETENTION__BEST": "{metric: lm loss validation, keep: 2, mode: max}",
    }
    assert load_config(environ=environ).retention == rules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{latest: 0}", "latest must be at least 1, got 0"),
        ("{every: 0}", "every must be at least 1, got 0"),
        ("{max_age_hours: -1}", "max_age_hours must be at least 0, got -1"),
        ("{best: {metric: x, keep: 0}}", "keep must be at least 1, got 0"),
        ("{best: {keep: 1}}", r"retention\.best\.metric is missing"),
        ("{best: {metric: x, mode: lowest}}", 'mode must be max or min, got "lowest"'),
        ("{best: {metric: x, kep: 1}}", r'no field "kep" \(did you mean keep\?\); its fields are'),
        ("{newest: 1}", "unknown setting retention.newest"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(f"retention: {text}"), {})


@pytest.mark.parametrize("value", [".inf", ".nan", "1.0e+10"])
def test_a_number_without_a_practical_bound_is_refused(value):
    variable = "FLASHCKPT_DRAIN_TIMEOUT_S"
    message = rf"{variable}: drain_timeout_s must be at most 1000000000, got"
    with pytest.raises(ConfigError, match=message):
        load_config(environ={variable: value})
    assert load_config(environ={variable: "1.0e+9"})
