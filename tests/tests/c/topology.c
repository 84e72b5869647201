// GPU nodes as the library tells of them (cases C51 and C53), to be compared between hosts.
#include "kmt.h"

int main(void) {
    HsaSystemProperties system;
    need("open", hsaKmtOpenKFD());
    need("system properties", hsaKmtAcquireSystemProperties(&system));
    int gpus = 0;
    for (HSAuint32 node = 0; node < system.NumNodes; node++) {
        HsaNodeProperties p;
        need("node properties", hsaKmtGetNodeProperties(node, &p));
        if (!p.NumFComputeCores)
            continue;
        printf("gpu %d: gpu_id %#x unique %#llx location %#x domain %u minor %d\n", gpus++, p.KFDGpuID,
               (unsigned long long)p.UniqueID, p.LocationId, p.Domain, p.DrmRenderMinor);
        printf("  name %s, engine %u.%u.%u, %u compute units (%u cores by %u)\n", (char *)p.AMDName,
               p.EngineId.ui32.Major, p.EngineId.ui32.Minor, p.EngineId.ui32.Stepping,
               p.NumFComputeCores / (p.NumSIMDPerCU ? p.NumSIMDPerCU : 1), p.NumFComputeCores, p.NumSIMDPerCU);
        printf("  LDS %u KiB, wave %u, clock %u MHz, vendor %#x device %#x\n", p.LDSSizeInKB, p.WaveFrontSize,
               p.MaxEngineClockMhzFCompute, p.VendorId, p.DeviceId);
        printf("  capability %#x, queues %u, sdma %u + %u, shader engines %u, arrays %u\n", p.Capability.Value,
               p.NumCpQueues, p.NumSdmaEngines, p.NumSdmaXgmiEngines, p.NumShaderBanks, p.NumArrays);
        HsaMemoryProperties banks[8];
        memset(banks, 0, sizeof banks);
        if (p.NumMemoryBanks > 8)
            return 3;
        need("memory", hsaKmtGetNodeMemoryProperties(node, p.NumMemoryBanks, banks));
        for (HSAuint32 bank = 0; bank < p.NumMemoryBanks; bank++)
            printf("  bank: heap %d, %llu bytes, width %u, clock %u\n", banks[bank].HeapType,
                   (unsigned long long)banks[bank].SizeInBytes, banks[bank].Width,
                   banks[bank].MemoryClockMax);
        HsaCacheProperties caches[512];
        memset(caches, 0, sizeof caches);
        HSAuint32 number = p.NumCaches > 512 ? 512 : p.NumCaches;
        need("caches", hsaKmtGetNodeCacheProperties(node, p.CComputeIdLo, number, caches));
        printf("  %u caches, first level %u of %u KiB, line %u\n", p.NumCaches, caches[0].CacheLevel,
               caches[0].CacheSize, caches[0].CacheLineSize);
        HsaIoLinkProperties links[32];
        memset(links, 0, sizeof links);
        if (p.NumIOLinks > 32)
            return 3;
        need("links", hsaKmtGetNodeIoLinkProperties(node, p.NumIOLinks, links));
        for (HSAuint32 link = 0; link < p.NumIOLinks; link++)
            printf("  link to node %u: type %d, weight %u, flags %#x\n", links[link].NodeTo,
                   links[link].IoLinkType, links[link].Weight, links[link].Flags.LinkProperty);
        HSAuint64 available = 0;
        HSAKMT_STATUS status = hsaKmtAvailableMemory(node, &available);
        printf("  available: %s, within the bank: %d\n", status_name(status),
               available > 0 && available <= banks[0].SizeInBytes);
    }
    HsaNodeProperties none;
    say("a node too many", hsaKmtGetNodeProperties(system.NumNodes, &none));
    printf("%d GPUs of %u nodes\n", gpus, system.NumNodes);
    say("close", hsaKmtCloseKFD());
    return 0;
}
