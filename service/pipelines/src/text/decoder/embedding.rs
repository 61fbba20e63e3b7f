//! The rows of the token embedding.

use candle_core::Tensor;
use gpu::{QuantizedWeight, Weight, WeightFormat};

/// Writes the embedding of each token to `out`, `[tokens, hidden_size]`. Of a table that a GGUF file stores in blocks only
/// the rows of these tokens are dequantized.
///
/// # Errors
/// For a table in another quantized format; errors of the device.
pub(super) fn embed_tokens(table: &Weight, ids: &[u32], out: &Tensor) -> candle_core::Result<()> {
    let table = match table {
        Weight::Full(table) => return ops::embed(table, &Tensor::new(ids, table.device())?, out),
        Weight::Quantized(table) => table,
    };
    let (&[rows, width], WeightFormat::Gguf(_)) = (table.shape.as_slice(), table.format) else {
        candle_core::bail!("a token embedding in {}", table.format);
    };
    let bytes_of_row = table.bytes.elem_count() / rows.max(1);
    for (place, &id) in ids.iter().enumerate() {
        let row = QuantizedWeight {
            bytes: table.bytes.narrow(0, id as usize * bytes_of_row, bytes_of_row)?,
            format: table.format,
            shape: vec![1, width],
        };
        ops::copy_rows(&ops::dequantize(&row, out.dtype())?, &out.narrow(0, place, 1)?)?;
    }
    Ok(())
}
