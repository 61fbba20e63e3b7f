//! The factors of several sets of adapters side by side, so that the terms of items with different sets are one batched product.

use candle_core::{Device, Result, Tensor};
use ops::{Gate, LowRank};

use super::LayerTerm;

/// The terms of a layer's sets as one term for each set, at their strengths: copies at equal distances, with the ranks of a set's terms
/// added up, and strength and scale within the numbers. `None` where that is no batched product: fewer than two sets have terms, or
/// their ranks differ.
///
/// # Errors
/// Errors of the device.
pub(super) fn side_by_side(sets: &[Vec<LayerTerm>], device: &Device) -> Result<Option<Vec<Vec<LayerTerm>>>> {
    let now = |terms: &Vec<LayerTerm>| -> Result<Vec<LowRank>> {
        let now = terms.iter().map(|term| term.now(device));
        Ok(now.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    };
    let now = sets.iter().map(now).collect::<Result<Vec<_>>>()?;
    let ranks = now
        .iter()
        .map(|terms| terms.iter().map(|term| term.down.dims()[0]).sum::<usize>());
    let ranks: Vec<usize> = ranks.filter(|rank| *rank > 0).collect();
    let (Some(&rank), Some(like)) = (ranks.first(), now.iter().flatten().next()) else {
        return Ok(None);
    };
    if ranks.len() < 2 || ranks.iter().any(|other| *other != rank) {
        return Ok(None);
    }
    let (inputs, outputs, dtype) = (like.down.dims()[1], like.up.dims()[0], like.down.dtype());
    let downs = Tensor::zeros((ranks.len(), rank, inputs), dtype, device)?;
    let ups = Tensor::zeros((ranks.len(), outputs, rank), dtype, device)?;
    let (mut beside, mut place) = (Vec::with_capacity(sets.len()), 0);
    for terms in now {
        if terms.is_empty() {
            beside.push(Vec::new());
            continue;
        }
        let (down, up) = (downs.get(place)?, ups.get(place)?);
        place += 1;
        let mut first = 0;
        for term in terms {
            let own = term.down.dims()[0];
            let rows = down.narrow(0, first, own)?;
            if term.factor == 1.0 {
                ops::copy_rows(&term.down, &rows)?;
            } else {
                let factor = Tensor::full(term.factor as f32, (1, inputs), &Device::Cpu)?;
                let factor = factor.to_dtype(dtype)?.to_device(device)?;
                ops::add_residual(&rows, &term.down, Some(Gate::from(&factor)))?;
            }
            ops::copy_rows(&term.up, &up.narrow(1, first, own)?)?;
            first += own;
        }
        beside.push(vec![LayerTerm::of_factors(down, up)]);
    }
    Ok(Some(beside))
}
