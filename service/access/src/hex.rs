//! Bytes as digits, as hashes are written.

/// The digits of bytes.
pub(crate) fn digits_of(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The 32 bytes of 64 digits; `None` for another text.
pub(crate) fn bytes_of(digits: &str) -> Option<[u8; 32]> {
    if digits.len() != 64 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, at) in bytes.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(&digits[at..at + 2], 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_read_as_they_are_written() {
        let bytes: [u8; 32] = std::array::from_fn(|at| at as u8 * 8);
        let digits = digits_of(&bytes);
        assert_eq!(bytes_of(&digits), Some(bytes));
        assert_eq!(bytes_of(&digits.to_uppercase()), Some(bytes));
        let signs = format!("+{}", &digits[1..]);
        for wrong in ["", &digits[2..], &format!("{digits}00"), &signs, &"é".repeat(32)] {
            assert_eq!(bytes_of(wrong), None, "{wrong}");
        }
    }
}
