//! Unsupported quantizations: their detection by tensor names, file metadata or configuration, and their messages.

use std::collections::BTreeMap;
use std::path::Path;

use gpu::CheckpointFile;
use serde::Deserialize;

use super::Checkpoint;
use crate::ModelError;
use crate::files::{damaged, read_json, unsupported};

/// Suffix of messages about unsupported quantizations.
pub(crate) const SUPPORTED: &str = "what is read is full precision, bitsandbytes nf4 and int8, GGUF, and fp8 (e4m3) of ComfyUI and \
                                    Black Forest Labs";

const FP4_STATE: &str = ".quant_state.bitsandbytes__fp4";

impl Checkpoint {
    /// Checks the names of tensors for unsupported quantizations.
    pub(super) fn check_foreign(&self) -> Result<(), ModelError> {
        let names: Vec<&str> = self.names().collect();
        if let Some(foreign) = foreign(&names) {
            return Err(unsupported(&self.place, quantized_by(foreign)));
        }
        #[derive(Deserialize)]
        struct ComfyQuant {
            format: String,
        }
        for name in self.names().filter(|name| name.ends_with(".comfy_quant")) {
            let ComfyQuant { format } = self.state(name)?;
            if format != "float8_e4m3fn" {
                return Err(unsupported(&self.place, quantized_by(&format)));
            }
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
    if ends(&[".wscales", ".smooth_factor", ".smooth", ".proj_down"]) {
        Some("SVDQuant (Nunchaku)")
    } else if ends(&[".qweight"]) {
        Some("SVDQuant (Nunchaku), AWQ or GPTQ")
    } else if ends(&[".weight_scale_2"]) {
        Some("nvfp4")
    } else if ends(&[":_data", ":qdata", ".qdata", "weight_qdata", ":int_data"]) {
        Some("torchao")
    } else if ends(&[".weight._data"]) {
        Some("quanto")
    } else if ends(&[FP4_STATE]) {
        Some("bitsandbytes fp4")
    } else {
        None
    }
}

pub(crate) fn quantized_by(what: &str) -> String {
    format!("it is quantized as {what}, which is not supported: {SUPPORTED}")
}

/// Checks the metadata of a file for unsupported quantizations.
pub(super) fn check_metadata(file: &CheckpointFile) -> Result<(), ModelError> {
    #[derive(Deserialize)]
    struct QuantizedLayer {
        format: String,
    }
    #[derive(Deserialize)]
    struct Quantized {
        #[serde(default)]
        layers: BTreeMap<String, QuantizedLayer>,
    }
    let Some(text) = file.metadata().get("_quantization_metadata") else {
        return Ok(());
    };
    let Quantized { layers } = serde_json::from_str(text).map_err(|e| {
        damaged(
            file.path(),
            format!("its _quantization_metadata cannot be parsed: {e}"),
        )
    })?;
    match layers.values().find(|layer| layer.format != "float8_e4m3fn") {
        Some(QuantizedLayer { format }) => Err(unsupported(file.path(), quantized_by(format))),
        None => Ok(()),
    }
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
    if method != "bitsandbytes" {
        return Err(unsupported(path, quantized_by(&method)));
    }
    match quantized.bnb_4bit_quant_type {
        Some(kind) if quantized.load_in_4bit && kind != "nf4" => {
            Err(unsupported(path, quantized_by(&format!("bitsandbytes {kind}"))))
        }
        _ => Ok(()),
    }
}
