//! Latents that clients ask for, upload and release.

use model::Values;
use tokio::time::Instant;

use super::Core;
use crate::error::Error;
use crate::job::{JobId, Latent, LatentInfo, Reach};
use crate::queue::latents::Maker;

impl Core {
    /// A latent with its tensors. This renews its time to live.
    pub(in crate::queue) fn latent(
        &mut self,
        id: &str,
        reach: &Reach,
        now: Instant,
    ) -> Result<Latent, Error> {
        self.latents.check(id, reach)?;
        self.latents.get(id, now)
    }

    pub(in crate::queue) fn put_latent(
        &mut self,
        values: Values,
        decoder_id: String,
        account: String,
        now: Instant,
    ) -> Result<LatentInfo, Error> {
        self.dirty = true;
        self.latents.put(values, decoder_id, account, now)
    }

    /// Puts a latent back that was in the store before.
    pub(in crate::queue) fn restore_latent(
        &mut self,
        latent: Latent,
        account: String,
        made_by: JobId,
        now: Instant,
    ) -> Result<(), Error> {
        self.dirty = true;
        let maker = Maker {
            job: made_by,
            account,
        };
        self.latents.restore(latent, maker, now)
    }

    /// False: there was none, or it had expired.
    pub(in crate::queue) fn release_latent(&mut self, id: &str, reach: &Reach) -> bool {
        self.dirty = true;
        self.latents.check(id, reach).is_ok() && self.latents.give_up(id)
    }
}
