//! Unsupported quantizations: their detection by tensor names, file metadata or configuration, and their messages.

use std::path::Path;

use serde::Deserialize;

use super::Checkpoint;
use crate::ModelError;
use crate::files::{read_json, unsupported};

/// Suffix of messages about unsupported quantizations.
pub(crate) const SUPPORTED: &str = "what is read is full precision, bitsandbytes nf4, fp4 and int8, GGUF, fp8 (e4m3 and e5m2), AWQ (gemm), \
                                    SVDQuant (Nunchaku), torchao (safetensors), and of ComfyUI's formats int8, int4, w4a8, mxfp8, nvfp4 and \
                                    awq_w4a16";

impl Checkpoint {
    /// Checks the names of tensors for unsupported quantizations.
    pub(super) fn check_foreign(&self) -> Result<(), ModelError> {
        let names: Vec<&str> = self.names().collect();
        if let Some(foreign) = foreign(&names) {
            return Err(unsupported(&self.place, quantized_by(foreign)));
        }
        Ok(())
    }
}

/// The unsupported quantization that tensors with these names belong to.
pub(crate) fn foreign(names: &[&str]) -> Option<&'static str> {
    let ends = |ends: &[&str]| {
        names
            .iter()
            .any(|name| ends.iter().any(|end| name.ends_with(end)))
    };
    if ends(&[".g_idx"]) {
        Some("GPTQ")
    } else if ends(&[":_data", ":qdata", ".qdata", ":int_data"]) {
        Some("torchao in an older layout")
    } else if ends(&[".weight._data"]) {
        Some("quanto")
    } else {
        None
    }
}

pub(crate) fn quantized_by(what: &str) -> String {
    format!("it is quantized as {what}, which is not supported: {SUPPORTED}")
}

/// Checks a component's configuration for unsupported quantizations.
pub(super) fn check_configuration(path: &Path) -> Result<(), ModelError> {
    #[derive(Deserialize)]
    struct Quantized {
        quant_method: Option<String>,
        #[serde(default)]
        load_in_4bit: bool,
        #[serde(default)]
        load_in_8bit: bool,
        bnb_4bit_quant_type: Option<String>,
    }
    #[derive(Deserialize)]
    struct Configuration {
        quantization_config: Option<Quantized>,
    }
    if !path.is_file() {
        return Ok(());
    }
    let Configuration { quantization_config } = read_json(path)?;
    let Some(quantized) = quantization_config else {
        return Ok(());
    };
    let bitsandbytes = quantized.load_in_4bit || quantized.load_in_8bit;
    let method = quantized
        .quant_method
        .unwrap_or_else(|| if bitsandbytes { "bitsandbytes" } else { "unnamed" }.to_owned());
    // What is read of the others is decided by their tensors.
    const BY_TENSORS: [&str; 5] = ["awq", "torchao", "nunchaku", "nunchaku_lite", "svdquant"];
    if BY_TENSORS.contains(&method.as_str()) {
        return Ok(());
    }
    if method != "bitsandbytes" {
        return Err(unsupported(path, quantized_by(&method)));
    }
    match quantized.bnb_4bit_quant_type {
        Some(kind) if quantized.load_in_4bit && kind != "nf4" && kind != "fp4" => {
            Err(unsupported(path, quantized_by(&format!("bitsandbytes {kind}"))))
        }
        _ => Ok(()),
    }
}
