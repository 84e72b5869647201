//! What belongs to the process as a whole: clocks, XNACK mode, trap handlers, tiling, SVM.
#![allow(unsafe_code, reason = "exported C functions")]
#![allow(non_snake_case, reason = "the API's names")]

use hsakmt_abi::svm::HsaSvmAttribute;
use hsakmt_abi::topology::{HsaClockCounters, HsaGpuTileConfig};
use virtio_kfd_protocol::GpuId;

use super::exports;
use super::pointer::{Address, Out, number};
use crate::thunk::memory::address::page_size;
use crate::thunk::refusal::{Outcome, Refusal};
use crate::thunk::{open, process};

/// What AMD's library looks at first.
fn svm_range(start: Address, size: u64) -> Outcome<()> {
    open::current()?;
    let (start, page) = (number(start), page_size());
    if start == 0 || size == 0 || !start.is_multiple_of(page) || !size.is_multiple_of(page) {
        return Err(Refusal::parameter(format!("{size:#x} bytes at {start:#x}, expected whole pages")));
    }
    Ok(())
}

exports! {
    "process";
    /// Clocks of a node.
    done("the CPU's and the system's clocks are the guest's")
    fn hsaKmtGetClockCounters(node_id: u32, counters: Out<HsaClockCounters>) {
        let thunk = open::current()?;
        let counters = counters.required("Counters")?;
        let snapshot = thunk.snapshot()?;
        let gpu = snapshot.gpu_of(node_id)?.map(|gpu| gpu.gpu_id);
        counters.write(process::clock_counters(&thunk.client, gpu)?);
        Ok(())
    }

    /// Sets the XNACK mode.
    done
    fn hsaKmtSetXNACKMode(enable: i32) {
        let thunk = open::current()?;
        process::xnack(&thunk.client, enable).map(|_| ())
    }

    /// The XNACK mode.
    done
    fn hsaKmtGetXNACKMode(enable: Out<i32>) {
        let thunk = open::current()?;
        let enable = enable.required("enable")?;
        enable.write(-1);
        enable.write(process::xnack(&thunk.client, -1)?);
        Ok(())
    }

    /// Sets the trap handler of a GPU.
    done
    fn hsaKmtSetTrapHandler(
        node_id: u32,
        trap_handler_base_address: Address,
        trap_handler_size_in_bytes: u64,
        trap_buffer_base_address: Address,
        trap_buffer_size_in_bytes: u64,
    ) {
        let _ = (trap_handler_size_in_bytes, trap_buffer_size_in_bytes);
        let thunk = open::current()?;
        // The host refuses a node without a GPU.
        let gpu_id = GpuId(thunk.snapshot()?.node(node_id)?.gpu_id);
        let (tba, tma) = (number(trap_handler_base_address), number(trap_buffer_base_address));
        process::set_trap_handler(&thunk.client, gpu_id, tba, tma)
    }

    /// Tiling of a GPU's images.
    done
    fn hsaKmtGetTileConfig(node_id: u32, config: Out<HsaGpuTileConfig>) {
        let thunk = open::current()?;
        let config = config.required("config")?;
        let gpu_id = GpuId(thunk.snapshot()?.node(node_id)?.gpu_id);
        let Some(mut asked) = config.read() else { return Err(Refusal::parameter("config is NULL")) };
        let (tile, macro_tile) = (asked.num_tile_configs, asked.num_macro_tile_configs);
        // As AMD's library leaves them where the kernel refuses.
        let zeros = |count: u32| vec![0; usize::try_from(count.min(MOST)).unwrap_or(0)];
        array(asked.tile_config).write_all(&zeros(tile));
        array(asked.macro_tile_config).write_all(&zeros(macro_tile));
        let found = process::tile_config(&thunk.client, gpu_id, tile, macro_tile)?;
        array(asked.tile_config).write_all(&found.tile);
        array(asked.macro_tile_config).write_all(&found.macro_tile);
        asked.num_tile_configs = found.answer.num_tile_configs.min(tile);
        asked.num_macro_tile_configs = found.answer.num_macro_tile_configs.min(macro_tile);
        asked.gb_addr_config = found.answer.gb_addr_config;
        asked.num_banks = found.answer.num_banks;
        asked.num_ranks = found.answer.num_ranks;
        config.write(asked);
        Ok(())
    }

    /// Sets attributes of a range of shared virtual memory.
    not_supported("SVM ties GPU addresses to CPU addresses of the process on the host")
    fn hsaKmtSVMSetAttr(start_addr: Address, size: u64, nattr: u32, attrs: Out<HsaSvmAttribute>) {
        let _ = (nattr, attrs);
        svm_range(start_addr, size)
    }

    /// Attributes of a range of shared virtual memory.
    not_supported("SVM ties GPU addresses to CPU addresses of the process on the host")
    fn hsaKmtSVMGetAttr(start_addr: Address, size: u64, nattr: u32, attrs: Out<HsaSvmAttribute>) {
        let _ = (nattr, attrs);
        svm_range(start_addr, size)
    }
}

/// Entries of a table that are looked at; the largest that a chip has is smaller.
const MOST: u32 = 4096;

/// A pointer that stands in a struct of the caller's.
fn array(address: u64) -> Out<u32> {
    Out::from(std::ptr::with_exposed_provenance_mut::<u32>(usize::try_from(address).unwrap_or(0)))
}
