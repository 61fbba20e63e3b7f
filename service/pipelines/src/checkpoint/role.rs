//! What may become of a tensor when its component is asked for quantized. Each family, and each part that families share,
//! says it of its own tensors.

/// What becomes of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Quantized where the component is asked for in a format.
    Quantized,
    /// In full precision unless the checkpoint stores it quantized.
    AsStored,
    /// In full precision.
    Full,
}

/// The rule of a component: the role of a tensor, by its name within the component in diffusers' words.
pub(crate) type RoleOf = fn(&str) -> Role;
