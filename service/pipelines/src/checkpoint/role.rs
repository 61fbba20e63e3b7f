//! Quantization roles of tensors, for a component that is requested in a format. Each family, and each shared part,
//! defines the roles of its own tensors.

/// The quantization of a tensor of a component that is requested in a format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QuantizeRole {
    /// Quantized to the requested format.
    Quantized,
    /// In full precision, unless the checkpoint stores it quantized.
    AsStored,
    /// Always in full precision.
    Full,
}

/// The roles of a component's tensors, by their names in diffusers.
pub(crate) type RoleOf = fn(&str) -> QuantizeRole;
