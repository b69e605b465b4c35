"""What an hour of a device and a million tokens cost. There are no built-in prices: all figures come from the user."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

from lossyspec.errors import ConfigurationError

from .accelerators import find_name

HOURS_A_YEAR = 8766.0  # 365.25 days


@dataclass(frozen=True)
class Price:
    """Cost of one device for an hour, in `currency`, and how it came about (`basis`, in words)."""

    device: str
    per_hour: float
    currency: str
    basis: str


@dataclass(frozen=True)
class PriceTerms:
    """The user's figures. per_hour, capital, power_w: by device name, as written. electricity: a kWh.

    source, date: where the figures come from and of when; echoed beside every cost.
    """

    per_hour: tuple[tuple[str, float], ...] = ()
    capital: tuple[tuple[str, float], ...] = ()
    power_w: tuple[tuple[str, float], ...] = ()
    years: float | None = None
    pue: float | None = None
    electricity: float | None = None
    currency: str = "USD"
    source: str | None = None
    date: str | None = None

    @property
    def given(self) -> bool:
        """True when there is any price at all."""
        return bool(self.per_hour or self.capital)


def parse_pairs(texts: Iterable[str], option: str) -> tuple[tuple[str, float], ...]:
    """NAME=NUMBER pairs of an option. Raises ConfigurationError naming the value and what is allowed."""
    pairs = []
    for text in texts:
        name, equals, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not equals or not name or not value > 0 or not isfinite(value):
            raise ConfigurationError(f"{option} {text!r}: expected NAME=NUMBER with a number over 0, such as h200-sxm=3.10")
        pairs.append((name, value))
    return tuple(pairs)


def price_terms(
    *,
    per_hour: Iterable[str] = (),
    capital: Iterable[str] = (),
    power_w: Iterable[str] = (),
    years: float | None = None,
    pue: float | None = None,
    electricity: float | None = None,
    currency: str = "USD",
    source: str | None = None,
    date: str | None = None,
) -> PriceTerms:
    """Terms as they come from a command line. Raises ConfigurationError naming the option, its value and what is allowed."""
    per_hour, capital, power_w = tuple(per_hour), tuple(capital), tuple(power_w)
    for option, value, least in (("--years", years, 0.0), ("--pue", pue, 1.0), ("--electricity", electricity, 0.0)):
        if value is not None and not (isfinite(value) and (value >= least if least else value > 0)):
            raise ConfigurationError(f"{option} is {value:g}; allowed: {'at least 1' if least else 'over 0'}")
    buying = {"--years": years, "--pue": pue, "--electricity": electricity, "--power": power_w}
    idle = [option for option, value in buying.items() if value is not None and value != ()]
    if idle and not capital:
        raise ConfigurationError(f"{', '.join(idle)}: used with --capital alone, which is not given")
    return PriceTerms(
        parse_pairs(per_hour, "--price"),
        parse_pairs(capital, "--capital"),
        parse_pairs(power_w, "--power"),
        years,
        pue,
        electricity,
        currency,
        source,
        date,
    )


def price_devices(terms: PriceTerms, devices: Sequence[str], board_power_w: dict[str, float]) -> dict[str, Price]:
    """Prices by device name. board_power_w: known limits, used where the user gives none.

    Raises ConfigurationError for a name that is no device here, a device priced twice, or capital without its terms.
    """
    prices: dict[str, Price] = {}
    power: dict[str, float] = {}
    for written, value in terms.power_w:
        name = find_name(written, devices, "--power")
        if name in power:
            raise ConfigurationError(f"--power {written}: it has {power[name]:g} W already; give one")
        power[name] = value

    def add(name: str, option: str, per_hour: float, basis: str) -> None:
        if name in prices:
            raise ConfigurationError(f"{option} {name}: it has a price already ({prices[name].basis}); give one")
        prices[name] = Price(name, per_hour, terms.currency, basis)

    for written, value in terms.per_hour:
        add(find_name(written, devices, "--price"), "--price", value, f"{value:g} {terms.currency} an hour")
    for written, value in terms.capital:
        name = find_name(written, devices, "--capital")
        missing = [
            option
            for option, given in (("--years", terms.years), ("--pue", terms.pue), ("--electricity", terms.electricity))
            if given is None
        ]
        if missing:
            raise ConfigurationError(f"--capital {written}: {', '.join(missing)} must be given with it")
        watts = power.get(name, board_power_w.get(name))
        if watts is None:
            raise ConfigurationError(f"--capital {written}: the power of {name} is not known; give --power {name}=WATTS")
        assert terms.years is not None and terms.pue is not None and terms.electricity is not None
        hourly = value / (terms.years * HOURS_A_YEAR) + watts / 1000 * terms.pue * terms.electricity
        limit = "" if name in power else ", the board's limit"
        add(name, "--capital", hourly, f"{value:g} {terms.currency} over {terms.years:g} years, and {watts:g} W{limit} at a "
            f"PUE of {terms.pue:g} and {terms.electricity:g} {terms.currency} a kWh")  # fmt: skip
    return prices


def cost_per_million(per_hour: float, tokens_per_s: float, utilisation: float) -> float:
    """Cost of a million tokens when the device decodes for `utilisation` (0-1] of the time that is paid for."""
    return per_hour * 1e6 / (3600.0 * tokens_per_s * utilisation)


def origin_text(terms: PriceTerms) -> str:
    """Where the prices come from and of when, in words."""
    return f"Prices: {terms.source or 'source not given'}, {terms.date or 'date not given'}."
