//! Where the tensors of a model are in a checkpoint.

/// A range of rows of a tensor of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) first: usize,
    pub(crate) count: usize,
}

/// A tensor of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorSpec {
    /// Name in diffusers.
    pub(crate) name: String,
    /// Shape, row-major.
    pub(crate) shape: Vec<usize>,
    /// The tensor of the checkpoint that contains it.
    pub(crate) tensor: String,
    /// Its row ranges there, concatenated.
    pub(crate) rows: Vec<Rows>,
}

impl TensorSpec {
    /// A tensor that is the whole of one with the same name.
    pub(crate) fn whole(name: String, shape: Vec<usize>) -> TensorSpec {
        let count = shape.first().copied().unwrap_or_default();
        TensorSpec {
            tensor: name.clone(),
            name,
            shape,
            rows: vec![Rows { first: 0, count }],
        }
    }
}
