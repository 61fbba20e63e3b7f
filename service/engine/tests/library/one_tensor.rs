//! A family of models with one tensor.

use std::path::Path;
use std::sync::Arc;

use gpu::{ByteRange, CheckpointFile, LoadPlan, Stored, Target, TensorSource};
use model::{Model, ModelError, ModelFile, Precision, provisional_identity};
use pipelines::{Family, FamilyList};
use residency::Component;

use crate::idle_model::IdleModel;

/// A file that begins with f32 numbers is a transformer with one weight of this shape, however large it is.
struct OneTensor(Vec<usize>);

impl Family for OneTensor {
    fn name(&self) -> &'static str {
        "one tensor"
    }
    fn open(
        &self,
        path: &Path,
        _file: Option<&CheckpointFile>,
        precision: &Precision,
    ) -> Result<Option<Arc<dyn Model>>, ModelError> {
        let formats = precision.quantization.formats(&["transformer"]);
        let format = formats.of("transformer");
        let file = ModelFile::at(path).unwrap();
        let range = ByteRange {
            offset: 0,
            length: 4 * self.0.iter().product::<usize>() as u64,
        };
        let source = TensorSource::full(
            "w",
            &file.path,
            [range],
            Stored::F32,
            self.0.clone(),
            precision.dtype,
        );
        let target = format.map_or(source.target, Target::Quantized);
        let plan = LoadPlan::Files(vec![TensorSource { target, ..source }]);
        let of = std::slice::from_ref(&file);
        let component = Component {
            id: provisional_identity(path, of, "transformer", precision.dtype, format),
            name: "transformer".into(),
            bytes: plan.bytes(),
            reload_seconds: 0.0,
            parts: residency::Parts::default(),
        };
        Ok(Some(Arc::new(
            IdleModel::new(precision).with(component, plan, file),
        )))
    }
}

/// The family whose tensor has this shape.
pub(crate) fn families(shape: &[usize]) -> FamilyList {
    FamilyList::new(vec![Box::new(OneTensor(shape.to_vec()))])
}
