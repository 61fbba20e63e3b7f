//! Parsing and formatting of sizes.

use residency::Bytes;

/// Units and their bytes, binary ones first: those are used for formatting.
const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
];

/// A size that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{given:?} is not a size: write a number with B, KiB, MiB, GiB, TiB, KB, MB, GB or TB, as in 24GiB")]
pub struct SizeError {
    pub given: String,
}

/// Parses a size: `24GiB`, `1.5 GB`, `4096`. Fractions are rounded down to whole bytes.
///
/// # Errors
/// [`SizeError`] if it is not a number with a known unit, or is more than 2⁶⁴ bytes.
pub fn parse_bytes(text: &str) -> Result<Bytes, SizeError> {
    let wrong = || SizeError {
        given: text.to_owned(),
    };
    let trimmed = text.trim();
    let digits_end = trimmed
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits_end);
    let unit = unit.trim();
    let scale = match unit {
        "" => 1,
        _ => {
            UNITS
                .iter()
                .find(|(name, _)| name.eq_ignore_ascii_case(unit))
                .ok_or_else(wrong)?
                .1
        }
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(scale).map(Bytes).ok_or_else(wrong);
    }
    let bytes = number.parse::<f64>().map_err(|_| wrong())? * scale as f64;
    if bytes >= u64::MAX as f64 {
        return Err(wrong());
    }
    Ok(Bytes(bytes as u64))
}

/// Formats a size so that [`parse_bytes`] returns exactly the same, in the largest binary unit that divides it.
pub fn exact_bytes(bytes: Bytes) -> String {
    if bytes == Bytes::ZERO {
        return "0".to_owned();
    }
    let (unit, scale) = UNITS[..4]
        .iter()
        .find(|(_, scale)| bytes.0.is_multiple_of(*scale))
        .copied()
        .unwrap_or(("B", 1));
    format!("{}{unit}", bytes.0 / scale)
}
