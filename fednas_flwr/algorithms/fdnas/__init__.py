"""FDNAS and CFDNAS: federated ProxylessNAS, then one network per cluster and hardware."""
