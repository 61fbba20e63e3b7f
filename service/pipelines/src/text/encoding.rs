//! Validation of token ids and encodings.

use candle_core::Tensor;

use model::StageError;

/// Checks the ids and their number.
pub(crate) fn check_ids(ids: &[u32], vocabulary: usize, most: usize) -> Result<(), StageError> {
    if ids.is_empty() || ids.len() > most {
        return Err(StageError::BadInput(format!(
            "{} tokens where 1 to {most} are expected",
            ids.len()
        )));
    }
    match ids.iter().find(|id| **id as usize >= vocabulary) {
        Some(id) => Err(StageError::BadInput(format!(
            "token {id} of a vocabulary of {vocabulary}"
        ))),
        None => Ok(()),
    }
}

/// Checks that an encoding is finite.
pub(crate) fn check_finite(encoding: &Tensor, component: &str) -> Result<(), StageError> {
    if ops::all_finite(encoding)? {
        return Ok(());
    }
    Err(StageError::NotFinite {
        component: component.to_owned(),
        step: 0,
    })
}
