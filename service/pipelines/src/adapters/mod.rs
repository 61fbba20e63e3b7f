//! Adapters (LoRA, Hu et al. 2021): low-rank terms that are added to linear layers and convolutions when they run. A base's
//! weights are never changed, so one resident base serves requests with different adapters at the same time.
//!
//! An adapter is opened by its header (`open`), with the names of every program that people train with (`spelling`). It becomes
//! a separate component for each component that it changes. Such components are planned, loaded, evicted and verified like any
//! other. At a stage they are attached to the layers (`attached`). The strength belongs to the request, and is no part of their
//! identity.

mod attached;
mod copies;
mod open;
mod scales;
mod set;
mod sets_of_items;
mod side_by_side;
mod spelling;
mod targets;

pub(crate) use model::{AdapterError, AdapterFile, AdapterKind, AdapterReport, AdapterUse, StrengthCurve};

pub(crate) use attached::{AdaptedTensors, AttachedAdapters, ConvolutionTerm, LayerTerm};
pub(crate) use copies::Copy;
pub(crate) use open::is_control_net_class;
pub(crate) use open::kind_of_folder;
pub(crate) use set::{AdapterSet, ConvolutionRanks, UsedAs};
pub(crate) use sets_of_items::SetsOfItems;
pub(crate) use targets::TargetComponent;
