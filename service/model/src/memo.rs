//! The identity of values that a stage returns and other jobs may take: it covers all inputs from which the values are
//! computed.
//!
//! A family states which part of a request a stage reads. The stage is run with that part alone ([`StagePlan::request_for`]),
//! so it cannot read fields that the family leaves out. [`identity_of_values`] adds the components of the stage, the
//! configurations that were read when the model was opened, and the values that the stage takes.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{Model, Request, StagePlan};

/// The part of a request that a stage reads.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Memo {
    /// Hash of the request.
    key: String,
    /// Not sent to workers, which get it as the request of their order.
    #[serde(skip)]
    request: Option<Arc<Request>>,
}

impl Memo {
    /// The memo of a request that has the fields the stage reads, and fixed values in all others.
    pub fn of(request: Request) -> Memo {
        let mut hash = blake3::Hasher::new();
        request.hash_into(&mut hash);
        Memo {
            key: hash.finalize().to_hex().to_string(),
            request: Some(Arc::new(request)),
        }
    }
}

impl PartialEq for Memo {
    fn eq(&self, other: &Memo) -> bool {
        self.key == other.key
    }
}

impl StagePlan {
    /// The request with which the stage is run. If other jobs may take the stage's values, this is only the part of the request
    /// that the stage reads. A stage that runs once per item returns values for no other job, and reads the seed of its item.
    pub fn request_for<'a>(&'a self, whole: &'a Request) -> &'a Request {
        let memo = self.memo.as_ref().filter(|_| !self.per_item);
        memo.and_then(|memo| memo.request.as_deref()).unwrap_or(whole)
    }
}

/// The identity of the values that the stage at `index` of a plan returns. Equal identities mean equal values, whatever else
/// differs between two requests or two models. `None` where no other job may take the values: the stage has no memo, or runs
/// once per item, or takes a value that has no identity or that a client uploads.
///
/// `components` returns the identities of a stage's components.
pub fn identity_of_values(
    model: &dyn Model,
    plan: &[StagePlan],
    index: usize,
    components: &dyn Fn(&[String]) -> Vec<String>,
) -> Option<String> {
    let stage = plan.get(index).filter(|stage| !stage.per_item)?;
    let memo = stage.memo.as_ref()?;
    let mut hash = blake3::Hasher::new();
    let mut add = |part: &[u8]| {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    };
    add(model.family().as_bytes());
    add(stage.name.as_bytes());
    add(memo.key.as_bytes());
    for component in components(&stage.components) {
        add(component.as_bytes());
    }
    add(&model.parts().configuration_of(&stage.components));
    for taken in &stage.takes {
        let giver = plan[..index]
            .iter()
            .rposition(|earlier| earlier.gives.contains(&taken.name))?;
        add(taken.name.as_bytes());
        add(identity_of_values(model, plan, giver, components)?.as_bytes());
    }
    Some(hash.finalize().to_hex().to_string())
}
