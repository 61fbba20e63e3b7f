//! Single numbers of checkpoints, in any stored type.

use gpu::Stored;
use half::{bf16, f16};

/// The number with these bytes; `None` for a type without single numbers, or too few bytes.
pub(crate) fn number_of(stored: Stored, bytes: &[u8]) -> Option<f64> {
    Some(match stored {
        Stored::F64 => f64::from_le_bytes(*bytes.first_chunk()?),
        Stored::F32 => f64::from(f32::from_le_bytes(*bytes.first_chunk()?)),
        Stored::F16 => f64::from(f16::from_le_bytes(*bytes.first_chunk()?)),
        Stored::Bf16 => f64::from(bf16::from_le_bytes(*bytes.first_chunk()?)),
        Stored::I64 => i64::from_le_bytes(*bytes.first_chunk()?) as f64,
        Stored::I32 => f64::from(i32::from_le_bytes(*bytes.first_chunk()?)),
        Stored::I8 => f64::from(*bytes.first()? as i8),
        Stored::U8 => f64::from(*bytes.first()?),
        Stored::F8E4M3 => f64::from(gpu::e4m3_to_f32(*bytes.first()?)),
        Stored::F8E5M2 => f64::from(gpu::e5m2_to_f32(*bytes.first()?)),
        Stored::F8E8M0 => f64::from(gpu::e8m0_to_f32(*bytes.first()?)),
        Stored::Gguf(_) => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_gives_the_same_number() {
        for (stored, bytes) in [
            (Stored::F64, 16f64.to_le_bytes().to_vec()),
            (Stored::F32, 16f32.to_le_bytes().to_vec()),
            (Stored::F16, f16::from_f32(16.0).to_le_bytes().to_vec()),
            (Stored::Bf16, bf16::from_f32(16.0).to_le_bytes().to_vec()),
            (Stored::I64, 16i64.to_le_bytes().to_vec()),
            (Stored::I32, 16i32.to_le_bytes().to_vec()),
            (Stored::I8, vec![16]),
            (Stored::U8, vec![16]),
            (Stored::F8E4M3, vec![0x58]),
        ] {
            assert_eq!(number_of(stored, &bytes), Some(16.0), "{stored:?}");
            assert_eq!(number_of(stored, &[]), None, "{stored:?}");
        }
    }

    #[test]
    fn e4m3_has_the_numbers_of_its_definition() {
        for (code, number) in [
            (0, 0.0),
            (1, 2f64.powi(-9)),
            (0x38, 1.0),
            (0x7e, 448.0),
            (0xfe, -448.0),
        ] {
            assert_eq!(number_of(Stored::F8E4M3, &[code]), Some(number), "{code:x}");
        }
        assert!(number_of(Stored::F8E4M3, &[0x7f]).is_some_and(f64::is_nan));
    }
}
